"""From an FX graph to sites: normalize -> find -> lift -> legal. Never imports kernels/ or ops/."""
