// Host side of blending, forward and backward. On a GPU SplatCall.threads, which counts CPU threads elsewhere, chooses
// between variants of the same results: 1 asks for the simple kernels, which the tests hold the fast ones against.
#include "../../kernels/blend_channels.cuh"
#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {
namespace {

BlendLists lists_of(const SplatView& view, const SplatFrame& frame) {
  return {frame.counters,
          frame.tile_starts,
          frame.tile_order,
          static_cast<const float*>(frame.projected),
          frame.isect_gaussians,
          frame.isect_grad_rows,
          frame.isect_masks,
          frame.tile_ends,
          view.width,
          view.height,
          tiles_across(view.width),
          int32_t(first_tile(view))};
}
BlendImages images_of(const SplatImages& images) {
  return {static_cast<float*>(images.image), static_cast<float*>(images.alpha), static_cast<float*>(images.depth)};
}
bool wants_simple(const SplatCall& call) { return call.threads == 1; }

template <bool Depth>
void launch_blend(const SplatCall& call, const SplatView& view, const SplatFrame& frame, const float* background,
                  const SplatImages& out) {
  const cudaStream_t stream = stream_of(call);
  const BlendLists lists = lists_of(view, frame);
  const int64_t tiles = band_tiles(view);
  if (wants_simple(call)) {
    SPLAT_LAUNCH((blend_simple<Depth>), tiles, kSimpleThreads, stream, lists, background, images_of(out));
  } else {
    SPLAT_LAUNCH((blend_fast<Depth>), tiles, kFastThreads, stream, lists, background, images_of(out));
  }
}

template <bool Depth, bool Abs>
void launch_blend_vjp(const SplatCall& call, const SplatView& view, const SplatFrame& frame, const SplatImages& out,
                      const SplatImages& v_out, float* partials) {
  const cudaStream_t stream = stream_of(call);
  const BlendLists lists = lists_of(view, frame);
  const BlendImages images = images_of(out), gradients = images_of(v_out);
  float* isect_grads = static_cast<float*>(frame.isect_grads);
  if (tiles_of(view) > INT32_MAX) throw std::runtime_error("the image has more than 2^31 - 1 tiles");
  const int32_t tiles = int32_t(band_tiles(view));
  if (wants_simple(call)) {
    SPLAT_LAUNCH((blend_vjp_simple<Depth, Abs>), tiles, kSimpleThreads, stream, lists, images, gradients, isect_grads,
                 partials);
  } else {
    SPLAT_LAUNCH((blend_vjp_fast<Depth, Abs>), fast_vjp_blocks(tiles), kVjpThreads, stream, lists, tiles, images,
                 gradients, isect_grads, partials);
  }
}

ChannelLists channels_of(const SplatFrame& frame, int32_t first = 0, int32_t width = 0) {
  const SplatChannels& channels = *frame.channels;
  return {static_cast<const float*>(channels.colors),
          frame.ids,
          static_cast<float*>(channels.isect_grads),
          static_cast<float*>(channels.v_colors),
          channels.count,
          first,
          width};
}

template <bool Depth>
void launch_blend_channels(const SplatCall& call, const SplatView& view, const SplatFrame& frame,
                           const float* background, const SplatImages& out) {
  const int64_t runs = (frame.channels->count + kChannelRun - 1) / kChannelRun;
  SPLAT_LAUNCH((blend_channels<Depth>), band_tiles(view) * runs, kFastThreads, stream_of(call), lists_of(view, frame),
               channels_of(frame), background, images_of(out));
}

// Passes over the intersections, each for some channels; the first one has the geometry.
void blend_channels_vjp_passes(const SplatCall& call, const SplatView& view, const SplatFrame& frame,
                               const SplatImages& out, const SplatImages& v_out, float* partials,
                               float* v_background) {
  const cudaStream_t stream = stream_of(call);
  const BlendLists lists = lists_of(view, frame);
  const BlendImages images = images_of(out), gradients = images_of(v_out);
  const int32_t count = frame.channels->count;
  float* isect_grads = static_cast<float*>(frame.isect_grads);
  for (int32_t first = 0; first < count; first += SPLAT_CHANNELS_AT_ONCE) {
    if (first > 0 && frame.channels->v_colors == nullptr) break;
    const int32_t width = count - first < SPLAT_CHANNELS_AT_ONCE ? count - first : SPLAT_CHANNELS_AT_ONCE;
    const ChannelLists channels = channels_of(frame, first, width);
    const auto launch = [&](auto geometry, auto depth, auto abs) {
      SPLAT_LAUNCH((blend_channels_vjp<geometry(), depth(), abs()>), band_tiles(view), kSimpleThreads, stream, lists,
                   channels, images, gradients, isect_grads, first == 0 ? partials : nullptr);
    };
    const std::true_type yes;
    const std::false_type no;
    if (first > 0 || isect_grads == nullptr) {
      launch(no, no, no);
    } else if (frame.with_abs) {
      v_out.depth != nullptr ? launch(yes, yes, yes) : launch(yes, no, yes);
    } else {
      v_out.depth != nullptr ? launch(yes, yes, no) : launch(yes, no, no);
    }
    if (frame.channels->v_colors == nullptr) continue;
    SPLAT_LAUNCH(sum_color_grads, chunks_of(frame.channels->n), kSumThreads, stream, frame.counters, frame.chunk_counts,
                 frame.tiles_per_gauss, frame.isect_grad_starts, channels);
  }
  if (v_background == nullptr) return;
  SPLAT_LAUNCH(sum_channel_background, count, kBackgroundThreads, stream, frame.counters, partials, tiles_of(view),
               v_background);
}

}  // namespace

void blend(const SplatCall& call, const SplatView& view, const SplatFrame& frame, const void* background,
           const SplatImages& out) {
  const float* bg = static_cast<const float*>(background);
  if (frame.channels != nullptr) {
    view.with_depth ? launch_blend_channels<true>(call, view, frame, bg, out)
                    : launch_blend_channels<false>(call, view, frame, bg, out);
  } else if (view.with_depth) {
    launch_blend<true>(call, view, frame, bg, out);
  } else {
    launch_blend<false>(call, view, frame, bg, out);
  }
}

// The background is in the image already, so that its value is not needed here.
void blend_vjp(const SplatCall& call, const SplatView& view, const SplatFrame& frame, const void*,
               const SplatImages& out, const SplatImages& v_out, void* background_partials, void* v_background) {
  float* partials = static_cast<float*>(background_partials);
  if (frame.channels != nullptr) {
    blend_channels_vjp_passes(call, view, frame, out, v_out, partials, static_cast<float*>(v_background));
    return;
  }
  const auto launch = [&](auto depth, auto abs) {
    launch_blend_vjp<depth(), abs()>(call, view, frame, out, v_out, partials);
  };
  if (frame.with_abs) {
    v_out.depth != nullptr ? launch(std::true_type(), std::true_type()) : launch(std::false_type(), std::true_type());
  } else {
    v_out.depth != nullptr ? launch(std::true_type(), std::false_type()) : launch(std::false_type(), std::false_type());
  }
  if (v_background == nullptr) return;
  SPLAT_LAUNCH(sum_background, 1, kBackgroundThreads, stream_of(call), frame.counters, partials, tiles_of(view),
               static_cast<float*>(v_background));
}

}  // namespace gpu
}  // namespace splat
