// Package deps tests that the code imports only what its table allows.
package deps

import (
	"bytes"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/spillway-ml/spillway"

// table lists, in the form of ARCHITECTURE.md, which of the module's packages a package may import,
// directly or indirectly. A name includes the packages below it; "" is the root package.
const table = `
	graph     <
	model     < graph internal/nearest
	precision < graph
	recompute < graph internal/nearest
	mesh      < graph
	lora      < graph internal/nearest
	zero      < graph
	fsdp      < graph zero
	offload   < graph internal/nearest internal/decimal
	offload/store < graph device internal/crash internal/regular internal/aside internal/filesys internal/userdir
	memplan   < graph
	plan      < graph mesh model precision recompute zero fsdp offload memplan internal/nearest internal/decimal lora
	config    < graph model precision recompute zero fsdp offload memplan plan comm/algorithm data/sample internal/nearest internal/decimal lora mesh
	search    < graph model precision recompute zero fsdp offload memplan plan internal/nearest internal/decimal lora mesh
	device    < graph internal/crash internal/dl internal/thread internal/userdir
	kernels   < graph device internal/crash internal/dl internal/thread internal/owned internal/regular internal/aside internal/userdir
	comm      < graph device kernels internal/crash internal/dl internal/thread internal/userdir
	exec      < graph device kernels comm plan memplan offload model zero fsdp precision recompute internal/nearest internal/crash internal/dl internal/thread internal/regular internal/decimal internal/owned internal/userdir lora mesh
	checkpoint < graph plan device internal model precision recompute zero fsdp offload memplan lora mesh
	data      < internal
	data/token < internal
	tensors   < checkpoint graph plan device internal model precision recompute zero fsdp offload memplan lora mesh
	cluster   <
	launch    < graph device kernels comm cluster internal/crash internal/dl internal/thread internal/userdir
	platform  < graph device kernels comm plan memplan offload model zero fsdp precision recompute internal lora mesh
	receipt   < internal
	run       < receipt platform graph device kernels comm plan memplan offload model zero fsdp precision recompute exec checkpoint data internal lora mesh
	calibration < receipt planner config platform graph device kernels comm plan memplan offload model zero fsdp precision recompute search exec checkpoint data run train internal lora mesh
	planner   < receipt config graph model precision recompute zero fsdp offload memplan plan search comm checkpoint exec run data platform device kernels internal lora mesh
	train     < receipt planner config platform graph device kernels comm plan memplan offload model zero fsdp precision recompute exec checkpoint data run search internal lora mesh
`

// pure packages touch no device, file or network. Their imports from outside the module are checked
// too.
var pure = []string{"graph", "model", "precision", "recompute", "mesh", "lora", "zero", "fsdp", "offload", "memplan", "plan", "config", "comm/algorithm", "data/sample", "search", "cluster", "comm/watch"}

var impure = []string{"os", "net", "syscall", "os/exec", "golang.org/x/sys", "unsafe"}

type pkg struct {
	ImportPath string
	Deps       []string
	Imports    []string
}

// load lists the module's packages.
func load(t *testing.T) map[string]pkg {
	all, err := listed()
	require.NoError(t, err)
	return all
}

// listed runs go list once for all tests.
var listed = sync.OnceValues(func() (map[string]pkg, error) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Deps,Imports", module+"/...").Output()
	if err != nil {
		return nil, err
	}
	all := map[string]pkg{}
	dec := json.NewDecoder(bytes.NewReader(out))
	for {
		var p pkg
		if err := dec.Decode(&p); err == io.EOF {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all[strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")] = p
	}
})

func below(path, name string) bool { return path == name || strings.HasPrefix(path, name+"/") }

func TestImportTable(t *testing.T) {
	all := load(t)
	require.Contains(t, all, "graph")
	rows := strings.Split(strings.TrimSpace(table), "\n")
	for path := range all { // packages that no row covers
		above := path == "" || slices.ContainsFunc([]string{"cmd", "examples", "benchmarks", "internal", "owntest"}, func(name string) bool { return below(path, name) })
		in := slices.ContainsFunc(rows, func(row string) bool {
			name, _, _ := strings.Cut(row, "<")
			return below(path, strings.TrimSpace(name))
		})
		require.True(t, above || in, "%s has no row in the table of imports", path)
	}
	for _, line := range rows {
		name, allowed, ok := strings.Cut(strings.TrimSpace(line), "<")
		require.True(t, ok, line)
		name = strings.TrimSpace(name)
		may := append(strings.Fields(allowed), name)
		for path, p := range all {
			// offload/store belongs to the layer of device, not to the rewrite.
			if !below(path, name) || path == "offload/store" && name != path {
				continue
			}
			for _, dep := range p.Deps {
				dep, ok := strings.CutPrefix(dep, module+"/")
				if ok && !slices.ContainsFunc(may, func(m string) bool { return below(dep, m) }) {
					t.Errorf("%s imports %s; it may import %s", path, dep, allowed)
				}
			}
		}
	}
}

func TestPurePackagesTouchNothing(t *testing.T) {
	for path, p := range load(t) {
		for _, name := range pure {
			if !below(path, name) || path == "offload/store" {
				continue
			}
			for _, imp := range p.Imports {
				for _, bad := range impure {
					if below(imp, bad) {
						t.Errorf("%s imports %s: the planning side touches no device, file or network", path, imp)
					}
				}
			}
		}
	}
}

// Programs contain no test code: only tests, benchmarks and owntest import internal/testkit.
func TestOnlyTestsImportTheTestkit(t *testing.T) {
	looked := 0
	for path, p := range load(t) {
		if path == "owntest" || below(path, "benchmarks") || below(path, "internal/testkit") {
			continue
		}
		looked++
		for _, imp := range p.Imports {
			require.False(t, below(imp, module+"/internal/testkit"), "%s imports %s", path, imp)
		}
	}
	require.Greater(t, looked, 50)
}

// The command plan compiles for the browser, where there are no devices, files or processes,
// without the packages that train.
func TestPlanCompilesForTheBrowser(t *testing.T) {
	env := append(os.Environ(), "GOOS=js", "GOARCH=wasm")
	cmd := exec.Command("go", "list", "-deps", module+"/cmd/spillway/web")
	cmd.Env = env
	deps, err := cmd.Output()
	require.NoError(t, err)
	require.Contains(t, string(deps), module+"/cmd/spillway/internal/planning\n")
	for _, name := range []string{"train", "calibration", "launch", "cmd/spillway/internal/here"} {
		require.NotContains(t, string(deps), module+"/"+name+"\n")
	}
	cmd = exec.Command("go", "build", module+"/cmd/spillway/internal/planning")
	cmd.Env = env
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// Only commands, examples and benchmarks import the root package.
func TestNothingBelowImportsTheTop(t *testing.T) {
	for path, p := range load(t) {
		if path == "" || below(path, "cmd") || below(path, "examples") || below(path, "benchmarks") {
			continue
		}
		require.NotContains(t, p.Deps, module, path)
	}
}

// The command and programs that import the root package do not contain heavy modules, such as
// gonum's charts and gorgonia's tensors.
func TestTheCommandStaysLight(t *testing.T) {
	all := load(t)
	for _, path := range []string{"", "cmd/spillway"} {
		require.NotEmpty(t, all[path].Deps, path)
		for _, dep := range all[path].Deps {
			for _, heavy := range []string{"gonum.org", "gorgonia.org", "github.com/apache/arrow"} {
				require.False(t, below(dep, heavy), "%q imports %s", path, dep)
			}
		}
	}
}

// Package run does not depend on a GPU; platform/gpu does.
func TestRanksKnowNoGPU(t *testing.T) {
	all := load(t)
	for _, dep := range all["run"].Deps {
		dep = strings.TrimPrefix(dep, module+"/")
		for _, gpu := range []string{"platform/gpu", "device/cuda/driver", "kernels/cuda", "comm/nccl", "comm/peers"} {
			require.False(t, below(dep, gpu), "run imports %s", dep)
		}
	}
}

// Only tests use doubles instead of GPUs.
func TestNobodyDoubles(t *testing.T) {
	looked := 0
	require.NoError(t, filepath.WalkDir(filepath.Join("..", ".."), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && (name == "testdata" || len(name) > 2 && name[0] == '.') {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		looked++
		for _, call := range []string{".DoubleCUDA("} {
			if strings.Contains(string(text), call) {
				t.Errorf("%s calls %s, which is for tests", path, strings.Trim(call, ".("))
			}
		}
		return err
	}))
	require.Greater(t, looked, 200)
}
