"""Speed, memory and size on this machine, each figure a ratio of two things measured in turns in one run."""
