"""What users of other libraries register to train their unchanged models. Nothing else in the package imports these."""
