//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Stand-ins for NVIDIA's programs print what those print, as their manuals show it.
const (
	sanitizerStandIn = `#!/bin/sh
echo "========= COMPUTE-SANITIZER"
echo "=== RUN   TestKernelsFollowTheCPU"
case "$2 $*" in
"memcheck "*adamw*)
	echo "========= Invalid __global__ write of size 4 bytes"
	echo "=========     at 0x70 in adamw"
	echo "=========     by thread (3,0,0) in block (1,0,0)"
	echo "=========     Address 0x7f2a00000400 is out of bounds"
	echo "========= Invalid __global__ read of size 4 bytes"
	echo "=========     at 0x90 in other"
	echo "========= ERROR SUMMARY: 2 errors"
	exit 77 ;;
"racecheck "*'attention$ '*)
	echo "========= Error: Race reported between Write access at 0x2d0 in attention_f32"
	echo "=========     and Read access at 0x510 in attention_f32 [24 hazards]"
	echo "========="
	echo "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"
	exit 77 ;;
"racecheck "*)
	echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
	exit 0 ;;
"synccheck "*TestRankSum*)
	sleep 600 ;;
"initcheck "*sqsum*)
	echo "--- FAIL: TestKernelsFollowTheCPU"
	echo "========= Target application returned an error"
	echo "========= ERROR SUMMARY: 0 errors"
	exit 1 ;;
"initcheck "*embed_grad*)
	echo "no summary"
	exit 0 ;;
"initcheck "*TestRankSum*)
	echo "--- SKIP: TestRankSum (0.00s)" ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
`
	ncuStandIn = `#!/bin/sh
echo "==PROF== Connected to process 7 (spillway)"
echo 'step 1, loss 10.9'
echo '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
row() { echo "\"$1\",\"7\",\"spillway\",\"127.0.0.1\",\"$2\",\"1\",\"7\",\"(256, 1, 1)\",\"(4, 1, 1)\",\"0\",\"9.0\",\"Command line profiler metrics\",\"$3\",\"$4\",\"$5\""; }
row 0 flash_forward_bf16 gpu__time_duration.sum ns 1,000
row 0 flash_forward_bf16 sm__throughput.avg.pct_of_peak_sustained_elapsed % 40
row 0 flash_forward_bf16 gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed % 10
row 0 flash_forward_bf16 sm__warps_active.avg.pct_of_peak_sustained_active % 50
row 1 flash_forward_bf16 gpu__time_duration.sum ns 3,000
row 1 flash_forward_bf16 sm__throughput.avg.pct_of_peak_sustained_elapsed % 80
row 1 flash_forward_bf16 gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed % 10
row 1 flash_forward_bf16 sm__warps_active.avg.pct_of_peak_sustained_active % n/a
row 2 adamw gpu__time_duration.sum ns 9,500
row 2 adamw gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed % 91.25
echo "==PROF== Disconnected from process 7"
`
	nsysStandIn = `#!/bin/sh
if [ "$1" = profile ]; then
	for a; do case "$a" in --output=*) echo > "${a#--output=}.nsys-rep" ;; esac; done
	exit 0
fi
case "$*" in *cuda_gpu_kern_sum*) echo "ERROR: Report 'cuda_gpu_kern_sum' could not be found."; exit 1 ;; esac
echo "Processing [profile.sqlite] with [gpukernsum.py]..."
echo
echo "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name"
echo '25.0,2000,2,1000.0,1000.0,1000,1000,0.0,"adamw"'
echo '75.0,6000,4,1500.0,1500.0,1000,2000,0.0,"void cutlass::Kernel<a, b>(T1::Params)"'
`
)

// onPath puts programs into PATH, with what a shell needs.
func onPath(t *testing.T, programs map[string]string) {
	dir := t.TempDir()
	for name, text := range programs {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755))
	}
	t.Setenv("PATH", dir+":/usr/bin:/bin")
	old := toolFolders
	toolFolders = nil
	t.Cleanup(func() { toolFolders = old })
}

func toolBundle(t *testing.T) *bundle {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "logs"), 0o755))
	return &bundle{dir: dir, out: dir, work: dir, device: "cuda", quick: true, gpu: &gpu{count: 1}}
}

// A finding, a hang, a test that fails and one without a summary are each named, and
// the rest is run.
func TestSanitizers(t *testing.T) {
	onPath(t, map[string]string{"compute-sanitizer": sanitizerStandIn})
	old := sanitizerLimit
	sanitizerLimit = 4 * time.Second // only the hang takes it
	defer func() { sanitizerLimit = old }()
	b, r := toolBundle(t), &result{}
	runSanitizers(t.Context(), b, r)
	require.Equal(t, failedStatus, r.Status)
	rows := map[string][]string{}
	for _, row := range r.Table[1:] {
		rows[row[0]] = row
	}
	n := len(sanitized)
	require.Equal(t, []string{"memcheck", number(n), number(n - 1), "2", "0", "TestKernelsFollowTheCPU/adamw: Invalid __global__ write of size 4 bytes at 0x70 in adamw"}, rows["memcheck"])
	require.Equal(t, []string{"racecheck", number(n), number(n - 1), "1", "1", "TestKernelsFollowTheCPU/attention: Error: Race reported between Write access at 0x2d0 in attention_f32"}, rows["racecheck"])
	require.Equal(t, []string{"synccheck", number(n), number(n - 1), "0", "0", ""}, rows["synccheck"])
	require.Equal(t, []string{"initcheck", number(n), number(n - 3), "0", "0", ""}, rows["initcheck"])
	said := strings.Join(r.Lines, "\n")
	require.Contains(t, said, "memcheck, TestKernelsFollowTheCPU/adamw: 2 errors, first: Invalid __global__ write of size 4 bytes at 0x70 in adamw (logs/sanitizer-memcheck-TestKernelsFollowTheCPU-adamw.txt)")
	require.Contains(t, said, "synccheck, TestRankSum: did not end within")
	require.Contains(t, said, "initcheck, TestKernelsFollowTheCPU/sqsum: no error found, but it ended with status 1")
	require.Contains(t, said, "initcheck, TestKernelsFollowTheCPU/embed_grad: it printed no summary")
	require.Contains(t, said, "initcheck, TestRankSum: the test was skipped")
	require.Len(t, r.Lines, 6)
}

func TestProfilers(t *testing.T) {
	onPath(t, map[string]string{"ncu": ncuStandIn, "nsys": nsysStandIn})
	b, r := toolBundle(t), &result{}
	runProfilers(t.Context(), b, r)
	require.Empty(t, r.Status, "%v", r.Lines)
	require.Equal(t, []string{
		"nsys: void cutlass::Kernel<a, b>(T1::Params) takes 75.0 % of the kernels' time, 4 launches of 1.5 µs",
		"nsys: adamw takes 25.0 % of the kernels' time, 2 launches of 1.0 µs",
	}, r.Lines)
	require.Equal(t, [][]string{
		{"adamw", "1", "9.5", "0.0", "91.2", "0.0"},
		{"flash_forward_bf16", "2", "4.0", "70.0", "10.0", "12.5"},
	}, r.Table[1:])

	onPath(t, map[string]string{"ncu": "#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device 0.'\nexit 1\n", "nsys": "#!/bin/sh\necho cannot >&2\nexit 2\n"})
	b, r = toolBundle(t), &result{}
	runProfilers(t.Context(), b, r)
	require.Equal(t, failedStatus, r.Status)
	require.Equal(t, []string{
		"nsys ended with status 2: cannot (logs/nsys.txt)",
		"ncu: the driver gives its counters to the administrator alone (ERR_NVGPUCTRPERM)",
	}, r.Lines)

	// What ncu told before it failed is kept.
	onPath(t, map[string]string{"ncu": ncuStandIn + "echo lost >&2\nexit 3\n"})
	b, r = toolBundle(t), &result{}
	runProfilers(t.Context(), b, r)
	require.Equal(t, failedStatus, r.Status)
	require.Len(t, r.Table, 3)
	require.Contains(t, r.Lines, "ncu ended with status 3: lost (logs/ncu.txt)")
	require.Contains(t, r.Lines, "nsys is not on this machine: neither in PATH nor where NVIDIA's packages put it")
}

// Where the programs are not there, or there is no GPU, the parts say so.
func TestToolsThatAreNotThere(t *testing.T) {
	onPath(t, nil)
	for _, v := range []string{"CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"} {
		t.Setenv(v, "")
	}
	t.Setenv("PATH", t.TempDir())
	b, r := toolBundle(t), &result{}
	runSanitizers(t.Context(), b, r)
	require.Equal(t, skipped, r.Status)
	require.Equal(t, "compute-sanitizer is not on this machine: neither in PATH nor where NVIDIA's packages put it", r.Lines[0])
	r = &result{}
	runProfilers(t.Context(), b, r)
	require.Equal(t, skipped, r.Status)
	require.Len(t, r.Lines, 3)
	b.gpu = nil
	for _, run := range []func(*result){func(r *result) { runSanitizers(t.Context(), b, r) }, func(r *result) { runProfilers(t.Context(), b, r) }} {
		r = &result{}
		run(r)
		require.Equal(t, skipped, r.Status)
		require.Len(t, r.Lines, 1)
	}
	// A toolkit that the environment names, then the usual folders, the newest first.
	root := t.TempDir()
	for _, at := range []string{"kit-1/ncu", "kit-2/ncu", "home/bin/nsys", "kit-2/nsys"} {
		path := filepath.Join(root, at)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"), 0o755))
	}
	t.Setenv("CUDA_HOME", filepath.Join(root, "home"))
	require.Equal(t, filepath.Join(root, "kit-2/ncu"), findTool("ncu", []string{filepath.Join(root, "kit-*")}))
	require.Equal(t, filepath.Join(root, "home/bin/nsys"), findTool("nsys", []string{filepath.Join(root, "kit-*")}))
}

func TestFindings(t *testing.T) {
	for text, want := range map[string]findings{
		"PASS\n":                              {},
		"========= ERROR SUMMARY: 0 errors\n": {whole: true},
		"========= Barrier error detected. Divergent thread(s) in block.\r\n=========     at 0xf0 in k\r\n========= ERROR SUMMARY: 1 error\n": {errors: 1, whole: true, first: "Barrier error detected. Divergent thread(s) in block. at 0xf0 in k"},
		"========= Uninitialized __global__ memory read of size 4 bytes\n=========     at sqsum+0x50\n========= ERROR SUMMARY: 12 errors":     {errors: 12, whole: true, first: "Uninitialized __global__ memory read of size 4 bytes at sqsum+0x50"},
		"========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to \"invalid argument\" on CUDA API call to cuX.\n":                     {first: `Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuX.`},
		"========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n":                                                            {errors: 2, warnings: 1, whole: true},
		"========= ERROR SUMMARY: 99999999999999999999 errors\n":                                                                              {errors: 1 << 30, whole: true},
	} {
		require.Equal(t, want, readSanitizer(text), text)
	}
	_, err := readNsys("nothing")
	require.ErrorContains(t, err, `no column "Instances"`)
	_, err = readNsys("Time (%),Instances\nx,y\n")
	require.ErrorContains(t, err, "is empty")
	_, err = readNcu("\"ID\",\"Metric Name\",\"Metric Value\"\n\"1\",\"sm__throughput.avg.pct_of_peak_sustained_elapsed\",\"3\"\n")
	require.ErrorContains(t, err, "no kernel has a time")
}
