"""Election without a store: the instances themselves vouch for one of them (``peers://``)."""
