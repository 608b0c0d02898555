"""What must stand before numpy is first imported, here and in the workers."""

import os
import platform

if platform.machine() in ("x86_64", "AMD64"):
    # Triton's interpreter multiplies by numpy's BLAS. With fused products its last bits depend on an element's place,
    # as they do on no GPU; so whatever a machine has chosen for itself is overruled.
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
