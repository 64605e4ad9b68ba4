"""How frozen weights are kept in four or eight bits: see :mod:`lorarun.quant.store`."""
