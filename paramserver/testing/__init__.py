"""Tests of training programs and of paramserver itself under planned faults, which strike and are counted."""
