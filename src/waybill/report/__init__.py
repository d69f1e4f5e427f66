"""Reports to look at: one HTML file for a checkpoint or a plan, that needs no network and no script."""
