"""Figures of the README that are no tests: measured on data that is not part of the project."""
