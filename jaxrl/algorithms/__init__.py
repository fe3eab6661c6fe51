"""What an algorithm makes of a batch: objective, advantages, signals, schedule."""
