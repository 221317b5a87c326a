"""Build entry. Everything static is in pyproject.toml; the native kernels will be declared here."""

from setuptools import setup

setup()
