"""The settings of every part: what a file may say, what it costs, and how its module is built. None needs torch."""
