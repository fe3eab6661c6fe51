"""From a batch to its loss: objective, advantages, signals, schedule."""
