"""The command line. Nothing here is imported by the rest of the package, and torch only when a command needs it."""
