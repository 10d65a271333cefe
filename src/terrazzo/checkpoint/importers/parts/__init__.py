"""What importers of several formats are made of: pickles that are not run, blocks of tensors, names, optimizers."""
