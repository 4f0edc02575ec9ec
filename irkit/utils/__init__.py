"""What every room uses: atomic files, weight files, progress, signals, forks."""
