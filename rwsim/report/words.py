"""What quantities and predictions are called in every report."""

# On an axis, with the unit; without one: in units of the weights.
AXES = {"norm": "norm", "rotation": "rotation, radians per step", "rms_update": "RMS update", "lr": "learning rate"}
# What every walk is measured by.
QUANTITIES = ("norm", "rotation", "rms_update")
# Forms of the prediction, the best first.
FORMS = (("full", "full prediction"), ("exact", "exact second moments"), ("paper", "paper, Table 1"))


def called(quantity: str) -> str:
    """Of a quantity, in a sentence.

    Example:
        >>> called("rms_update"), called("norm path")
        ('RMS update', 'norm path')
    """
    return quantity.replace("rms_", "RMS ").replace("_", " ")


def heading(quantity: str) -> str:
    """Of a quantity, at the beginning of a line.

    Example:
        >>> heading("norm")
        'Norm'
    """
    said = {"lr": "learning rate"}.get(quantity, called(quantity))
    return said[:1].upper() + said[1:]
