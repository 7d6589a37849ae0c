_C = "simulated"
