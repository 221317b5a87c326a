"""The folder that goes on PYTHONPATH. No other module than ``sitecustomize.py`` may stand here."""

from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent)
