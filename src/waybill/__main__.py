"""`python -m waybill`, the form `torchrun` starts."""

from waybill.cli.app import main

if __name__ == "__main__":
    main()
