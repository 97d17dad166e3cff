"""What a training step uses: attention, replicas of a module, gradient hooks, random streams."""
