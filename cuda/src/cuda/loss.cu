// L1 + SSIM and its gradient on the device: kernels/loss.cuh.
//
// Device memory moved, bytes a pixel of three channels: the image 12 and the target 3 (uint8) or 12 (float), read by
// both sweeps; the derivative maps 36, written and read; the gradient 12. With a uint8 target 114 (forward alone: 15),
// with a float one 132, and what neighbouring strips read twice, if the second-level cache has lost it: at most 41%
// of image and target in the first sweep and 45% of the maps.
#include "../../kernels/loss.cuh"

#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {
namespace {

struct LossGrid {
  int width, records;  // numbers a row, records of a row of maps
  int across, down;
  int64_t strips;
  explicit LossGrid(const SplatLoss& loss)
      : width(loss.channels * loss.width), records((loss.width + 1) / 2 * loss.channels),
        across((width + kLossColumns - 1) / kLossColumns), down((loss.height + kLossRows - 1) / kLossRows),
        strips(int64_t(across) * down * loss.images) {}
  int64_t map_records(const SplatLoss& loss) const { return int64_t(records) * loss.height * loss.images; }
};

template <class Target, int kChannels>
void sweeps(cudaStream_t stream, const SplatLoss& loss, const LossGrid& grid, const LossArrays& arrays) {
  const double l1_count = numbers_within(loss.width, loss.height, loss.channels, loss.images, 0);
  const double ssim_count = numbers_within(loss.width, loss.height, loss.channels, loss.images, loss.border);
  if (loss.v_image != nullptr) {
    SPLAT_LAUNCH((loss_statistics<Target, kChannels, true>), grid.strips, kLossThreads, stream, arrays);
    const float l1_scale = float((1.0 - loss.ssim_lambda) / l1_count);
    const float ssim_scale = float(-loss.ssim_lambda / ssim_count);
    SPLAT_LAUNCH((loss_gradient<Target, kChannels>), grid.strips, kLossThreads, stream, arrays, l1_scale, ssim_scale,
                 static_cast<float*>(loss.v_image));
  } else {
    SPLAT_LAUNCH((loss_statistics<Target, kChannels, false>), grid.strips, kLossThreads, stream, arrays);
  }
  SPLAT_LAUNCH(loss_means, 1, kLossSumThreads, stream, arrays.partials, grid.strips, l1_count, ssim_count,
               loss.counters, loss.means);
}

template <class Target>
void sweeps_of(cudaStream_t stream, const SplatLoss& loss, const LossGrid& grid, const LossArrays& arrays) {
  if (loss.channels == 1)
    sweeps<Target, 1>(stream, loss, grid, arrays);
  else
    sweeps<Target, 3>(stream, loss, grid, arrays);
}

}  // namespace

int64_t loss_bytes(const SplatLoss& loss) {
  const LossGrid grid(loss);
  return 2 * grid.strips * int64_t(sizeof(double)) + grid.map_records(loss) * int64_t(sizeof(float4) + sizeof(float2));
}

void loss(const SplatCall& call, SplatLoss& loss) {
  const LossGrid grid(loss);
  LossArrays arrays = {};
  arrays.image = static_cast<const float*>(loss.image);
  arrays.target = loss.target;
  arrays.partials = static_cast<double*>(loss.workspace);
  arrays.mean_square = reinterpret_cast<float4*>(arrays.partials + 2 * grid.strips);
  arrays.product = reinterpret_cast<float2*>(arrays.mean_square + grid.map_records(loss));
  arrays.counters = loss.counters;
  arrays.width = grid.width, arrays.height = loss.height, arrays.records = grid.records;
  arrays.across = grid.across, arrays.down = grid.down, arrays.images = loss.images, arrays.border = loss.border;
  const cudaStream_t stream = stream_of(call);
  if (loss.target_is_u8 != 0)
    sweeps_of<uint8_t>(stream, loss, grid, arrays);
  else
    sweeps_of<float>(stream, loss, grid, arrays);
}

}  // namespace gpu
}  // namespace splat
