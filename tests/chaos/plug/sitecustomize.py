"""Python imports this before anything else in every process of a run that has this folder on its PYTHONPATH: trainer
ranks and engine. It plants the faults of tests/chaos/plants.py into the modules that they belong to."""

import os

if "CHAOS" in os.environ:
    from tests.chaos.plants import plant_all

    plant_all()
