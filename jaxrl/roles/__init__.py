"""What workers compute: actor, rollout, teacher, reference, reward, grouper."""
