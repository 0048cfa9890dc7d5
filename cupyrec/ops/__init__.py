"""Operations: one family a file, with its formula, checks and loops, forward and backward."""
