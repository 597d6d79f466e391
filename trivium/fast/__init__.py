"""The fast floor: final subclasses of plain modules with the same parameters, chosen in `choose.py`."""
