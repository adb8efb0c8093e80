"""Finding, reading and building models. Modules say whether they import torch."""
