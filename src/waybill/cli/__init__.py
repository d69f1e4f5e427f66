"""The command line: parse, one library call, render. The library never prints."""
