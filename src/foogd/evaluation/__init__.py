"""From a trained model to rows of numbers."""
