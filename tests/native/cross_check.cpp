// One training step through splat.h, from made-up numbers, with every output written to stdout: the same program is
// built for several processors, and test_aarch64.py compares what they print. Usage: cross_check THREADS
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "splat.h"

namespace {

constexpr int kN = 700, kDegree = 3, kCoefficients = 15, kWidth = 93, kHeight = 71;
constexpr int kPadded = (kN + SPLAT_CHUNK - 1) / SPLAT_CHUNK * SPLAT_CHUNK;
constexpr int kTiles = ((kWidth + 15) / 16) * ((kHeight + 15) / 16);

uint32_t state = 12345;
float uniform() {  // in [0, 1), exact on every machine
  state = state * 1664525u + 1013904223u;
  return float(state >> 8) / 16777216.0f;
}

struct Numbers {
  std::vector<float> means, quats, log_scales, logits, sh0, shN;
  explicit Numbers(float fill = 0.0f)
      : means(3 * kN, fill), quats(4 * kN, fill), log_scales(3 * kN, fill), logits(kN, fill), sh0(3 * kN, fill),
        shN(3 * kN * kCoefficients, fill) {}
  SplatGaussians view() {
    SplatGaussians g = {};
    g.struct_size = sizeof g, g.shN_count = kCoefficients, g.n = kN;
    g.means = means.data(), g.quats = quats.data(), g.log_scales = log_scales.data();
    g.logit_opacities = logits.data(), g.sh0 = sh0.data(), g.shN = shN.data();
    return g;
  }
};

void check(int32_t result, const char* what) {
  if (result == 0) return;
  std::fprintf(stderr, "%s: %s\n", what, splat_last_error());
  std::exit(1);
}

template <class T>
void put(const char* name, const std::vector<T>& numbers, size_t count) {
  std::printf("%s %zu %zu\n", name, sizeof(T), count);
  std::fwrite(numbers.data(), sizeof(T), count, stdout);
  std::printf("\n");
}

void put(const char* prefix, Numbers& n) {
  const auto named = [&](const char* name, const std::vector<float>& numbers) {
    put((std::string(prefix) + name).c_str(), numbers, numbers.size());
  };
  named("means", n.means), named("quats", n.quats), named("log_scales", n.log_scales);
  named("logit_opacities", n.logits), named("sh0", n.sh0), named("shN", n.shN);
}

}  // namespace

int main(int argc, char** argv) {
  SplatCall call = {};
  call.struct_size = sizeof call, call.dtype = SPLAT_FLOAT32, call.threads = argc > 1 ? std::atoi(argv[1]) : 1;
  Numbers params;
  for (int i = 0; i < kN; ++i) {
    for (int k = 0; k < 3; ++k) params.means[3 * i + k] = 3.0f * uniform() - 1.5f + (k == 2 ? 4.0f : 0.0f);
    for (int k = 0; k < 4; ++k) params.quats[4 * i + k] = uniform() - 0.5f;
    for (int k = 0; k < 3; ++k) params.log_scales[3 * i + k] = -4.0f + 2.5f * uniform();
    params.logits[i] = 6.0f * uniform() - 3.0f;
    for (int k = 0; k < 3; ++k) params.sh0[3 * i + k] = 2.0f * uniform() - 1.0f;
    for (int k = 0; k < 3 * kCoefficients; ++k) params.shN[3 * kCoefficients * i + k] = 0.4f * uniform() - 0.2f;
  }
  SplatGaussians gaussians = params.view();
  SplatView view = {};
  view.struct_size = sizeof view, view.width = kWidth, view.height = kHeight, view.sh_degree = kDegree;
  view.antialiased = 1, view.with_depth = 1, view.tile_row_end = (kHeight + 15) / 16;
  for (int k = 0; k < 4; ++k) view.viewmat[5 * k] = 1.0;
  view.fx = view.fy = 80.0, view.cx = 0.5 * kWidth, view.cy = 0.5 * kHeight, view.z_near = 0.01, view.z_far = 1e10;

  // The arrays of a view; 64-byte aligned where splat.h asks for it.
  SplatFrame frame = {};
  frame.struct_size = sizeof frame;
  const auto aligned = [](size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); };
  frame.projected = aligned(kPadded * SPLAT_PROJECTED * sizeof(float));
  std::vector<int32_t> ids(kPadded), tile_ends(kTiles);
  std::vector<int64_t> counts(2 * kPadded / SPLAT_CHUNK), tile_starts(kTiles + 1);
  std::vector<uint32_t> per_gauss(kPadded), starts(kPadded);
  frame.ids = ids.data(), frame.chunk_counts = counts.data(), frame.tiles_per_gauss = per_gauss.data();
  check(splat_project(&call, &view, &gaussians, &frame, nullptr), "project");
  std::vector<uint32_t> isect_gaussians(frame.max_isects), rows(frame.max_isects);
  std::vector<uint16_t> masks(frame.max_isects);
  frame.isect_grad_starts = starts.data(), frame.tile_starts = tile_starts.data(), frame.tile_ends = tile_ends.data();
  frame.isect_gaussians = isect_gaussians.data(), frame.isect_grad_rows = rows.data(), frame.isect_masks = masks.data();
  frame.workspace_bytes = splat_bin_bytes(&call, &view, &frame);
  frame.workspace = aligned(size_t(frame.workspace_bytes));
  check(splat_bin(&call, &view, &gaussians, &frame), "bin");
  frame.isect_grads = aligned(size_t(frame.isects) * SPLAT_ISECT_GRAD * sizeof(float));

  const size_t pixels = size_t(kWidth) * kHeight;
  std::vector<float> image(3 * pixels), alpha(pixels), depth(pixels), v_image(3 * pixels);
  std::vector<uint8_t> target(3 * pixels);
  for (uint8_t& number : target) number = uint8_t(256.0f * uniform());
  const float background[3] = {0.1f, 0.5f, 0.9f};
  SplatImages out = {};
  out.struct_size = sizeof out, out.image = image.data(), out.alpha = alpha.data(), out.depth = depth.data();
  check(splat_blend(&call, &view, &frame, background, &out), "blend");

  SplatLoss loss = {};
  loss.struct_size = sizeof loss, loss.width = kWidth, loss.height = kHeight, loss.target_is_u8 = 1;
  loss.channels = 3, loss.images = 1, loss.ssim_lambda = 0.2;
  loss.image = image.data(), loss.target = target.data(), loss.v_image = v_image.data();
  loss.workspace = aligned(size_t(splat_loss_bytes(&call, &loss)));
  check(splat_loss(&call, &loss), "loss");

  std::vector<float> partials(3 * kTiles), v_background(3);
  SplatImages v_out = out;
  v_out.image = v_image.data(), v_out.alpha = nullptr, v_out.depth = nullptr;
  check(splat_blend_vjp(&call, &view, &frame, background, &out, &v_out, partials.data(), v_background.data()), "vjp");
  Numbers gradients, first, second;
  std::vector<float> pose(kPadded / SPLAT_CHUNK * SPLAT_POSE), v_viewmat(16);
  SplatGaussians v = gradients.view();
  SplatProjectGrad grad = {};
  grad.struct_size = sizeof grad, grad.gradients = &v, grad.pose_partials = pose.data();
  check(splat_project_vjp(&call, &view, &gaussians, &frame, &grad), "project_vjp");
  check(splat_pose_vjp(&call, &view, &frame, pose.data(), kPadded / SPLAT_CHUNK, v_viewmat.data()), "pose_vjp");
  SplatAdam adam = {};
  adam.struct_size = sizeof adam, adam.step = 3, adam.beta1 = 0.9, adam.beta2 = 0.999, adam.eps = 1e-15;
  for (double& lr : adam.lr) lr = 1e-3;
  adam.exp_avg = first.view(), adam.exp_avg_sq = second.view();
  SplatNoise noise = {};
  noise.struct_size = sizeof noise, noise.seed = 7, noise.step = 3, noise.scale = 0.1;
  noise.threshold = 0.005, noise.steepness = 100.0;

  put("image", image, image.size()), put("alpha", alpha, alpha.size()), put("depth", depth, depth.size());
  put("tile_starts", tile_starts, tile_starts.size());
  put("isect_gaussians", isect_gaussians, size_t(frame.isects)), put("isect_masks", masks, size_t(frame.isects));
  put("loss", std::vector<double>{loss.l1, loss.ssim}, 2), put("v_image", v_image, v_image.size());
  put("v_viewmat", v_viewmat, v_viewmat.size()), put("v_background", v_background, v_background.size());
  put("gradient.", gradients);
  check(splat_adam(&call, &gaussians, &v, &adam), "adam");
  check(splat_noise(&call, &gaussians, &noise), "noise");
  put("stepped.", params);
  return 0;
}
