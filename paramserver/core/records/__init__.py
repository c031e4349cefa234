"""The values of ``ctx.log``: how those of several workers become one value per step, and the curves of them."""
