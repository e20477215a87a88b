"""Operations: each a reference in plain torch, its kernels, and its registration with torch."""
