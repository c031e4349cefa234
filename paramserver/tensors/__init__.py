"""Tensors as bytes: element types, frames of the bulk streams, hyper-parameters. Importing it does not import torch."""
