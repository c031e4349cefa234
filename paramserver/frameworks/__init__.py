"""Frameworks on the backend "paramserver" of torch.distributed, a module for each; see docs/frameworks.md."""
