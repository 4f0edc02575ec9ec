"""Speed and memory of irkit against its peers: correctness first, ratios within one run."""
