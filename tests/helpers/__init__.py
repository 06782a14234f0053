"""Helpers that several tests import, by subject. `setup.cfg` puts the folder `tests` on the path of imports."""
