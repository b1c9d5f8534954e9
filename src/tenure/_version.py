"""The version of this package, for those that can't import it as a whole: it imports them."""

VERSION = "0.1.0"
