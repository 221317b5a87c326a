"""The folder that goes on PYTHONPATH. Nothing but ``sitecustomize.py`` may stand here."""

from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent)
