#include "cuda/products.h"

namespace tilemoe::cuda {

void require_products(const DeviceInfo& device) {
  TILEMOE_CHECK_SUPPORTED(
      has_products(device),
      device.name << " has compute capability " << device.capability()
                  << ", the layer's grouped GEMMs need 9.0 (H100, H200): routing, the router's "
                     "backward and its losses run here, for the layer use the CPU backend");
}

}  // namespace tilemoe::cuda
