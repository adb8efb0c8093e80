"""This package finds, reads and builds models. Modules say whether they import torch."""
