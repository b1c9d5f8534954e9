"""A shop that takes orders in every instance, packs them in any of them, and is restocked by one."""
