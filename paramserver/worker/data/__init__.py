"""Where the samples of a slice come from: what a DataLoader samples, the order of an epoch, seeds."""
