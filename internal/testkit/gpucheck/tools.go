package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

// toolFolders are folders outside PATH in which NVIDIA's packages install their programs. If one
// folder has several versions, the last by name is used.
var toolFolders = []string{
	"/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer",
	"/usr/local/cuda-*/bin", "/usr/local/cuda-*/compute-sanitizer", "/usr/local/cuda/extras/compute-sanitizer",
	"/opt/nvidia/nsight-compute/*", "/opt/nvidia/nsight-systems/*/bin", "/opt/nvidia/nsight-systems/*/target-linux-x64", "/opt/nvidia/nsight-systems-cli/*/bin",
	"/usr/lib/nvidia-cuda-toolkit/bin", "/usr/lib/nvidia-cuda-toolkit/compute-sanitizer", "/usr/lib/nsight-compute", "/usr/lib/nsight-systems/bin",
	"/opt/conda/bin",
}

// findTool returns the path of an NVIDIA program from PATH, from the toolkit that the environment
// names, or from the usual folders. It returns "" if there is none.
func findTool(name string, folders []string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	for _, v := range []string{"CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"} {
		if root := os.Getenv(v); root != "" {
			folders = append([]string{filepath.Join(root, "bin"), filepath.Join(root, "compute-sanitizer")}, folders...)
		}
	}
	for _, pattern := range folders {
		found, err := filepath.Glob(filepath.Join(pattern, name))
		if err != nil {
			continue // a root with brackets in its name
		}
		slices.Reverse(found)
		for _, path := range found {
			if at, err := exec.LookPath(path); err == nil {
				return at
			}
		}
	}
	return ""
}

// tool is findTool in the usual folders. If the program is missing, the part reports that.
func (r *result) tool(name string) string {
	path := findTool(name, toolFolders)
	if path == "" {
		r.say("%s is not on this machine: neither in PATH nor where NVIDIA's packages put it", name)
	}
	return path
}
