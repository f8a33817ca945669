package nvml

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/dynlib"
)

// stub is an NVML with two GPUs. The second has an old driver that supports few calls.
const stub = `
#include <stdint.h>
#include <string.h>
typedef struct { uint64_t total, free, used; } memory;
static int running;
static const char *names[] = {"NVIDIA One", "NVIDIA Two"};
static const char *uuids[] = {"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-2"};
static int put(char *to, unsigned n, const char *text) {
	if (strlen(text) + 1 > n) return 7;
	memset(to, 'x', n);
	strcpy(to, text);
	return 0;
}
int nvmlInit_v2(void) { running = 1; return 0; }
int nvmlShutdown(void) { running = 0; return 0; }
const char *nvmlErrorString(int code) { return code == 6 ? "Not Found" : "Other"; }
int nvmlSystemGetDriverVersion(char *to, unsigned n) { return put(to, n, "580.1"); }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return running ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, uintptr_t *d) { *d = 100 + i; return i < 2 ? 0 : 6; }
int nvmlDeviceGetHandleByUUID(const char *u, uintptr_t *d) {
	for (int i = 0; i < 2; i++)
		if (!strcmp(u, uuids[i])) { *d = 100 + i; return 0; }
	return 6;
}
int nvmlDeviceGetName(uintptr_t d, char *to, unsigned n) { return put(to, n, names[d - 100]); }
int nvmlDeviceGetUUID(uintptr_t d, char *to, unsigned n) { return put(to, n, uuids[d - 100]); }
int nvmlDeviceGetMemoryInfo(uintptr_t d, memory *m) { m->total = 5ull << 33; m->free = 1; m->used = d; return 0; }
int nvmlDeviceGetMaxClockInfo(uintptr_t d, int which, unsigned *mhz) { *mhz = 1000 * which + (d - 100); return 0; }
#ifdef NEW
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory2;
int nvmlDeviceGetMemoryInfo_v2(uintptr_t d, memory2 *m) {
	if (m->version != (sizeof *m | 2u << 24)) return 25;
	m->total = (5ull << 33) + 77; m->reserved = 77; m->free = 1; m->used = d;
	return 0;
}
int nvmlDeviceGetNumGpuCores(uintptr_t d, unsigned *n) { *n = 16896; return 0; }
int nvmlDeviceGetMemoryBusWidth(uintptr_t d, unsigned *n) { *n = 6144; return 0; }
#endif
`

// standIn compiles the stub under the library's name and makes it the one that is found.
func standIn(t *testing.T, flags ...string) {
	dir := t.TempDir()
	source := filepath.Join(dir, "stub.c")
	require.NoError(t, os.WriteFile(source, []byte(stub), 0o644))
	args := append(flags, "-shared", "-fPIC", "-o", filepath.Join(dir, Names[0]), source)
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Skipf("needs a C compiler: %v %s", err, out)
	}
	t.Setenv(dynlib.Env, dir)
}

func TestSymbols(t *testing.T) {
	standIn(t, "-DNEW")
	l, err := OpenSymbols()
	require.NoError(t, err)
	version, err := l.DriverVersion()
	require.NoError(t, err)
	require.Equal(t, "580.1", version)
	n, err := l.Count()
	require.NoError(t, err)
	require.Equal(t, 2, n)
	d, err := l.ByIndex(1)
	require.NoError(t, err)
	name, err := d.Name()
	require.NoError(t, err)
	require.Equal(t, "NVIDIA Two", name)
	total, used, err := d.Memory()
	require.NoError(t, err)
	require.Equal(t, [2]int64{5 << 33, 101}, [2]int64{total, used})
	clock, err := d.MaxClock(ClockMemory)
	require.NoError(t, err)
	require.Equal(t, 2001, clock)
	cores, err := d.Cores()
	require.NoError(t, err)
	bus, err := d.BusWidth()
	require.NoError(t, err)
	require.Equal(t, [2]int{16896, 6144}, [2]int{cores, bus})

	first, err := l.ByUUID(UUIDText([16]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}))
	require.NoError(t, err)
	uuid, err := first.UUID()
	require.NoError(t, err)
	require.Equal(t, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", uuid)
	_, err = l.ByUUID("GPU-3")
	require.EqualError(t, err, "nvmlDeviceGetHandleByUUID: Not Found (6)")
	l.Close()
	_, err = l.Count()
	require.ErrorContains(t, err, "nvmlDeviceGetCount_v2")
}

// If a driver is older than a call, the call reports that its value is unknown. Nothing else fails.
func TestAnOlderDriver(t *testing.T) {
	standIn(t)
	l, err := OpenSymbols()
	require.NoError(t, err)
	defer l.Close()
	d, err := l.ByIndex(0)
	require.NoError(t, err)
	_, err = d.Cores()
	require.ErrorIs(t, err, errOlder)
	_, used, err := d.Memory()
	require.NoError(t, err)
	require.EqualValues(t, 100, used)
}
