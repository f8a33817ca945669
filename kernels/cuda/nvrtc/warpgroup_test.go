package nvrtc_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
)

// warpGroup is a kernel with a warp-group product, for compute capability 9.0a.
const warpGroup = `extern "C" __global__ void product(float *y, unsigned long long a, unsigned long long b) {
	float d[4] = {0, 0, 0, 0};
	asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
	asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0; }"
		: "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(1));
	asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
	asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
	for (int i = 0; i < 4; i++) y[4 * threadIdx.x + i] = d[i];
}`

// NVRTC before 12.0 knows neither this architecture nor these instructions. Attention could have a
// special form for Hopper only if its machine code can be compiled and checked here: see
// docs/decisions/gpu.md. If this test fails, reconsider that decision.
func TestWarpGroupProducts(t *testing.T) {
	c := open(t, nvrtc.Options{Cache: "-"})
	_, log, err := c.Report("product.cu", warpGroup, "sm_90a")
	if !strings.HasPrefix(c.Version(), "11.") {
		require.NoError(t, err, "NVRTC %s:\n%s", c.Version(), log)
		t.Logf("NVRTC %s compiles products of warp groups", c.Version())
		return
	}
	require.ErrorContains(t, err, "NVRTC_ERROR_INVALID_OPTION")
	_, _, err = c.Report("product.cu", warpGroup, "sm_90")
	require.ErrorContains(t, err, "Not a name of any known instruction: 'wgmma'")
}
