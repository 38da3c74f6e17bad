"""Training recipes: how the weights this project ships were made, one command per model."""
