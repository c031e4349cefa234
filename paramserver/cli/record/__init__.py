"""Commands that write down what a running job does."""
