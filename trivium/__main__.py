"""`python -m trivium`: the command line without an installed script."""

from trivium.cli.main import main

main()
