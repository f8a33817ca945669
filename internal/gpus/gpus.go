// Package gpus has a table of accelerators for plans (memory, matrix rates and links, from
// their makers' documents) and reads from NVML which GPUs this machine has.
package gpus

import (
	"fmt"
	"slices"
	"strings"

	names "github.com/spillway-ml/spillway/internal/nearest"
)

// Rates are dense matrix products in FLOP/s (OP/s for integers) by the type of the operands, with
// fp32 accumulation for floating-point types; 0 if the chip has no such unit.
type Rates struct{ FP32, TF32, FP16, BF16, INT8, FP8 float64 }

// GPU is an accelerator, in a typical server of its maker.
type GPU struct {
	Name    string   // as listed; lower case
	Aliases []string // other names that Lookup accepts; lower case
	Product string   // as NVML calls it, after "NVIDIA "
	Arch    Arch
	Memory  int64 // bytes that the driver shows (nvidia-smi's total), after ECC
	Used    int64 // bytes in use, if Detect found the GPU
	Rates   Rates

	MemoryBandwidth float64 // bytes/s
	NVLink          float64 // bytes/s in one direction, from a GPU to the others of its node; 0: none
	PCIe            float64 // bytes/s in one direction to the host
	Network         float64 // bytes/s in one direction, a GPU's share of the node's network
	Source          string
}

// Server is the usual host of GPUs of one kind, as sold or rented.
type Server struct {
	Memory int64 // bytes of host memory for each GPU
	Source string
}

// servers maps presets to the host that a plan assumes if no host is specified.
var servers = map[string]Server{
	"t4-16":        {48 << 30, "AWS g4dn.12xlarge: 192 GiB for 4 GPUs"},
	"v100-16":      {64e9, "NVIDIA DGX-1: 512 GB for 8 GPUs"},
	"v100-32":      {64e9, "NVIDIA DGX-1: 512 GB for 8 GPUs"},
	"a10-24":       {256e9, "Oracle BM.GPU.A10.4: 1 TB for 4 GPUs"},
	"a10g-24":      {96 << 30, "AWS g5.48xlarge: 768 GiB for 8 GPUs"},
	"a30-24":       {128e9, "a server of 1 TB for 8 GPUs"},
	"l20-48":       {128e9, "a server of 1 TB for 8 GPUs"},
	"h20-96":       {256e9, "a server of 2 TB for 8 GPUs"},
	"mi300x-192":   {231 << 30, "Azure ND96isr MI300X v5: 1,850 GiB for 8 GPUs"},
	"a100-40":      {128e9, "NVIDIA DGX A100 320GB: 1 TB for 8 GPUs"},
	"a100-80":      {256e9, "NVIDIA DGX A100 640GB: 2 TB for 8 GPUs"},
	"l4-24":        {48e9, "Google Cloud g2-standard-96: 384 GB for 8 GPUs"},
	"l40s":         {192 << 30, "AWS g6e.48xlarge: 1,536 GiB for 8 GPUs"},
	"h100-pcie-80": {128e9, "a server of 1 TB for 8 GPUs"},
	"h100-80":      {256e9, "NVIDIA DGX H100: 2 TB for 8 GPUs"},
	"h200-141":     {256e9, "NVIDIA DGX H200: 2 TB for 8 GPUs"},
	"gh200-96":     {480e9, "the 480 GB of the Grace CPU"},
	"b200-192":     {256e9, "NVIDIA DGX B200: 2 TB for 8 GPUs"},
}

// desktop is the assumed host of GPUs for desktops and workstations.
var desktop = Server{64e9, "a desktop or workstation of 64 GB for each GPU"}

// Server returns the usual server of this GPU.
func (g GPU) Server() Server {
	if s, ok := servers[g.Name]; ok {
		return s
	}
	return desktop
}

// ForRanks returns the part of a server's memory that ranks may use, in bytes: a sixteenth is left
// for the system.
func ForRanks(memory int64) int64 { return memory - memory/16 }

// Arch is a GPU generation.
type Arch string

// Generations.
const (
	Volta     Arch = "volta"
	Turing    Arch = "turing"
	Ampere    Arch = "ampere"
	Ada       Arch = "ada"
	Hopper    Arch = "hopper"
	Blackwell Arch = "blackwell"
	CDNA3     Arch = "cdna3" // AMD's, for plans only: Spillway does not run on it
)

// outside is the GPU memory that a process needs outside its arena, in bytes. It consists of the
// context (which grows with the number of multiprocessors and the driver's modules), cuBLASLt's
// handle and own workspace (32 MiB since Hopper, 4 MiB before; Spillway's products use a workspace
// in the plan), and NCCL's channels. The numbers are estimates from nvidia-smi figures of such
// processes, until each generation is measured.
var outside = map[Arch]int64{
	Volta:     500 << 20,
	Turing:    350 << 20,
	Ampere:    650 << 20,
	Ada:       600 << 20,
	Hopper:    850 << 20,
	Blackwell: 1000 << 20,
	CDNA3:     1000 << 20, // Blackwell's value: nothing is known
}

// HostOutsideBytes is the host memory that a process needs for one rank's GPU: the driver's
// structures of a context, the libraries' loaded code and NCCL's host buffers. It is an estimate,
// not yet measured.
const HostOutsideBytes = 300 << 20

// OutsideBytes estimates the GPU memory that a process needs outside its arena, in bytes:
// context, libraries and communication buffers.
func (g GPU) OutsideBytes() int64 {
	if n, ok := outside[g.Arch]; ok {
		return n
	}
	return outside[Blackwell]
}

const (
	tera = 1e12
	giga = 1e9
	mib  = 1 << 20

	// One direction of 16 lanes, after 128b/130b coding.
	pcie3x16 = 15.75 * giga
	pcie4x16 = 31.5 * giga
	pcie5x16 = 63 * giga

	gbit = giga / 8
)

// table has dense matrix rates (NVIDIA also prints, or only prints, sparse ones). Memory is
// nvidia-smi's total.
var table = []GPU{
	{Name: "t4-16", Aliases: []string{"t4"}, Product: "Tesla T4", Arch: Turing, Memory: 15360 * mib,
		Rates: Rates{FP32: 8.1 * tera, FP16: 65 * tera, INT8: 130 * tera}, MemoryBandwidth: 320 * giga, PCIe: pcie3x16, Network: 25 * gbit,
		Source: "NVIDIA T4 datasheet"},
	// DGX-1: 8 GPUs share four 100 Gb/s ports.
	{Name: "v100-16", Product: "Tesla V100-SXM2-16GB", Arch: Volta, Memory: 16160 * mib,
		Rates: Rates{FP32: 15.7 * tera, FP16: 125 * tera}, MemoryBandwidth: 900 * giga, NVLink: 150 * giga, PCIe: pcie3x16, Network: 50 * gbit,
		Source: "NVIDIA V100 datasheet (SXM2); DGX-1 user guide"},
	{Name: "v100-32", Aliases: []string{"v100"}, Product: "Tesla V100-SXM2-32GB", Arch: Volta, Memory: 32510 * mib,
		Rates: Rates{FP32: 15.7 * tera, FP16: 125 * tera}, MemoryBandwidth: 900 * giga, NVLink: 150 * giga, PCIe: pcie3x16, Network: 50 * gbit,
		Source: "NVIDIA V100 datasheet (SXM2); DGX-1 user guide"},
	{Name: "a10-24", Aliases: []string{"a10"}, Product: "A10", Arch: Ampere, Memory: 23028 * mib,
		Rates: Rates{FP32: 31.2 * tera, TF32: 62.5 * tera, FP16: 125 * tera, BF16: 125 * tera, INT8: 250 * tera}, MemoryBandwidth: 600 * giga, PCIe: pcie4x16, Network: 25 * gbit,
		Source: "NVIDIA A10 datasheet"},
	// AWS's own product: half of the tensor rates on its sheet, which are sparse.
	{Name: "a10g-24", Aliases: []string{"a10g"}, Product: "A10G", Arch: Ampere, Memory: 23028 * mib,
		Rates: Rates{FP32: 35 * tera, TF32: 35 * tera, FP16: 70 * tera, BF16: 70 * tera, INT8: 140 * tera}, MemoryBandwidth: 600 * giga, PCIe: pcie4x16, Network: 12.5 * gbit,
		Source: "NVIDIA A10G datasheet (AWS G5); g5.48xlarge: 100 Gb/s for 8 GPUs"},
	// An NVLink bridge joins two cards only: not counted.
	{Name: "a30-24", Aliases: []string{"a30"}, Product: "A30", Arch: Ampere, Memory: 24576 * mib,
		Rates: Rates{FP32: 10.3 * tera, TF32: 82 * tera, FP16: 165 * tera, BF16: 165 * tera, INT8: 330 * tera}, MemoryBandwidth: 933 * giga, PCIe: pcie4x16, Network: 25 * gbit,
		Source: "NVIDIA A30 datasheet"},
	// DGX A100: a 200 Gb/s port for each GPU.
	{Name: "a100-40", Product: "A100-SXM4-40GB", Arch: Ampere, Memory: 40536 * mib,
		Rates: Rates{FP32: 19.5 * tera, TF32: 156 * tera, FP16: 312 * tera, BF16: 312 * tera, INT8: 624 * tera}, MemoryBandwidth: 1555 * giga, NVLink: 300 * giga, PCIe: pcie4x16, Network: 200 * gbit,
		Source: "NVIDIA A100 datasheet (SXM4); DGX A100 datasheet"},
	{Name: "a100-80", Aliases: []string{"a100"}, Product: "A100-SXM4-80GB", Arch: Ampere, Memory: 81251 * mib,
		Rates: Rates{FP32: 19.5 * tera, TF32: 156 * tera, FP16: 312 * tera, BF16: 312 * tera, INT8: 624 * tera}, MemoryBandwidth: 2039 * giga, NVLink: 300 * giga, PCIe: pcie4x16, Network: 200 * gbit,
		Source: "NVIDIA A100 datasheet (SXM4); DGX A100 datasheet"},
	{Name: "a6000-48", Aliases: []string{"a6000", "rtx-a6000"}, Product: "RTX A6000", Arch: Ampere, Memory: 49140 * mib,
		Rates: Rates{FP32: 38.7 * tera, TF32: 77.4 * tera, FP16: 154.8 * tera, BF16: 154.8 * tera, INT8: 309.7 * tera}, MemoryBandwidth: 768 * giga, PCIe: pcie4x16, Network: 25 * gbit,
		Source: "NVIDIA RTX A6000 datasheet; Ampere GA102 whitepaper"},
	// An NVLink bridge joins two cards only: not counted.
	{Name: "rtx-3090", Aliases: []string{"3090", "rtx3090"}, Product: "GeForce RTX 3090", Arch: Ampere, Memory: 24576 * mib,
		Rates: Rates{FP32: 35.6 * tera, TF32: 35.6 * tera, FP16: 71 * tera, BF16: 71 * tera, INT8: 284 * tera}, MemoryBandwidth: 936 * giga, PCIe: pcie4x16, Network: 25 * gbit,
		Source: "NVIDIA Ampere GA102 whitepaper, table of GeForce RTX 3090 (fp16 with fp32 accumulation)"},
	{Name: "l4-24", Aliases: []string{"l4"}, Product: "L4", Arch: Ada, Memory: 23034 * mib,
		Rates: Rates{FP32: 30.3 * tera, TF32: 60 * tera, FP16: 121 * tera, BF16: 121 * tera, INT8: 242 * tera, FP8: 242 * tera}, MemoryBandwidth: 300 * giga, PCIe: pcie4x16, Network: 25 * gbit,
		Source: "NVIDIA L4 datasheet (half of the sparse rates)"},
	{Name: "l20-48", Aliases: []string{"l20"}, Product: "L20", Arch: Ada, Memory: 46068 * mib,
		Rates: Rates{FP32: 59.8 * tera, TF32: 59.8 * tera, FP16: 119.5 * tera, BF16: 119.5 * tera, INT8: 239 * tera, FP8: 239 * tera}, MemoryBandwidth: 864 * giga, PCIe: pcie4x16, Network: 25 * gbit,
		Source: "NVIDIA L20 datasheet"},
	{Name: "l40s", Aliases: []string{"l40s-48"}, Product: "L40S", Arch: Ada, Memory: 46068 * mib,
		Rates: Rates{FP32: 91.6 * tera, TF32: 183 * tera, FP16: 362 * tera, BF16: 362 * tera, INT8: 733 * tera, FP8: 733 * tera}, MemoryBandwidth: 864 * giga, PCIe: pcie4x16, Network: 50 * gbit,
		Source: "NVIDIA L40S datasheet"},
	{Name: "rtx-4090", Aliases: []string{"4090", "rtx4090"}, Product: "GeForce RTX 4090", Arch: Ada, Memory: 24564 * mib,
		Rates: Rates{FP32: 82.6 * tera, TF32: 82.6 * tera, FP16: 165.2 * tera, BF16: 165.2 * tera, INT8: 660.6 * tera, FP8: 330.3 * tera}, MemoryBandwidth: 1008 * giga, PCIe: pcie4x16, Network: 25 * gbit,
		Source: "NVIDIA Ada GPU architecture whitepaper, appendix A (fp16 and fp8 with fp32 accumulation)"},
	{Name: "rtx-6000-ada", Aliases: []string{"6000-ada"}, Product: "RTX 6000 Ada Generation", Arch: Ada, Memory: 49140 * mib,
		Rates: Rates{FP32: 91.1 * tera, TF32: 182.1 * tera, FP16: 364.2 * tera, BF16: 364.2 * tera, INT8: 728.5 * tera, FP8: 728.5 * tera}, MemoryBandwidth: 960 * giga, PCIe: pcie4x16, Network: 25 * gbit,
		Source: "NVIDIA RTX 6000 Ada Generation datasheet; Ada whitepaper"},
	{Name: "h100-pcie-80", Aliases: []string{"h100-pcie"}, Product: "H100 PCIe", Arch: Hopper, Memory: 81559 * mib,
		Rates: Rates{FP32: 51 * tera, TF32: 378 * tera, FP16: 756 * tera, BF16: 756 * tera, INT8: 1513 * tera, FP8: 1513 * tera}, MemoryBandwidth: 2000 * giga, PCIe: pcie5x16, Network: 200 * gbit,
		Source: "NVIDIA H100 datasheet (PCIe; half of the sparse rates)"},
	// DGX H100: a 400 Gb/s port for each GPU.
	{Name: "h100-80", Aliases: []string{"h100"}, Product: "H100 80GB HBM3", Arch: Hopper, Memory: 81559 * mib,
		Rates: Rates{FP32: 67 * tera, TF32: 494.7 * tera, FP16: 989.4 * tera, BF16: 989.4 * tera, INT8: 1978.9 * tera, FP8: 1978.9 * tera}, MemoryBandwidth: 3350 * giga, NVLink: 450 * giga, PCIe: pcie5x16, Network: 400 * gbit,
		Source: "NVIDIA H100 datasheet and Hopper whitepaper (SXM5); DGX H100 datasheet"},
	{Name: "h20-96", Aliases: []string{"h20"}, Product: "H20", Arch: Hopper, Memory: 97871 * mib,
		Rates: Rates{FP32: 44 * tera, TF32: 74 * tera, FP16: 148 * tera, BF16: 148 * tera, INT8: 296 * tera, FP8: 296 * tera}, MemoryBandwidth: 4000 * giga, NVLink: 450 * giga, PCIe: pcie5x16, Network: 400 * gbit,
		Source: "NVIDIA HGX H20 datasheet"},
	{Name: "h200-141", Aliases: []string{"h200"}, Product: "H200", Arch: Hopper, Memory: 143771 * mib,
		Rates: Rates{FP32: 67 * tera, TF32: 494.7 * tera, FP16: 989.4 * tera, BF16: 989.4 * tera, INT8: 1978.9 * tera, FP8: 1978.9 * tera}, MemoryBandwidth: 4800 * giga, NVLink: 450 * giga, PCIe: pcie5x16, Network: 400 * gbit,
		Source: "NVIDIA H200 datasheet (SXM5); DGX H200 datasheet"},
	// The link to Grace replaces PCIe: NVLink-C2C, 450 GB/s in each direction.
	{Name: "gh200-96", Aliases: []string{"gh200"}, Product: "GH200 480GB", Arch: Hopper, Memory: 97871 * mib,
		Rates: Rates{FP32: 67 * tera, TF32: 494.7 * tera, FP16: 989.4 * tera, BF16: 989.4 * tera, INT8: 1978.9 * tera, FP8: 1978.9 * tera}, MemoryBandwidth: 4000 * giga, PCIe: 450 * giga, Network: 400 * gbit,
		Source: "NVIDIA GH200 Grace Hopper Superchip datasheet"},
	{Name: "b200-192", Aliases: []string{"b200", "b200-180"}, Product: "B200", Arch: Blackwell, Memory: 183359 * mib,
		Rates: Rates{FP32: 75 * tera, TF32: 1125 * tera, FP16: 2250 * tera, BF16: 2250 * tera, INT8: 4500 * tera, FP8: 4500 * tera}, MemoryBandwidth: 8000 * giga, NVLink: 900 * giga, PCIe: pcie5x16, Network: 400 * gbit,
		Source: "NVIDIA HGX and DGX B200 datasheets (an eighth; half of the sparse rates)"},
	// Seven Infinity Fabric links of 64 GB/s in each direction, one to each of the other GPUs.
	{Name: "mi300x-192", Aliases: []string{"mi300x"}, Product: "AMD Instinct MI300X", Arch: CDNA3, Memory: 196592 * mib,
		Rates: Rates{FP32: 163.4 * tera, TF32: 653.7 * tera, FP16: 1307.4 * tera, BF16: 1307.4 * tera, INT8: 2614.9 * tera, FP8: 2614.9 * tera}, MemoryBandwidth: 5300 * giga, NVLink: 448 * giga, PCIe: pcie5x16, Network: 400 * gbit,
		Source: "AMD Instinct MI300X data sheet (for plans: Spillway does not run on it)"},
	{Name: "rtx-5080", Aliases: []string{"5080", "rtx5080"}, Product: "GeForce RTX 5080", Arch: Blackwell, Memory: 16303 * mib,
		Rates: Rates{FP32: 56.3 * tera, TF32: 56.3 * tera, FP16: 112.6 * tera, BF16: 112.6 * tera, INT8: 450.2 * tera, FP8: 225.1 * tera}, MemoryBandwidth: 960 * giga, PCIe: pcie5x16, Network: 25 * gbit,
		Source: "NVIDIA RTX Blackwell GPU architecture whitepaper (fp16 and fp8 with fp32 accumulation)"},
	{Name: "rtx-5090", Aliases: []string{"5090", "rtx5090"}, Product: "GeForce RTX 5090", Arch: Blackwell, Memory: 32607 * mib,
		Rates: Rates{FP32: 104.8 * tera, TF32: 104.8 * tera, FP16: 209.5 * tera, BF16: 209.5 * tera, INT8: 838 * tera, FP8: 419 * tera}, MemoryBandwidth: 1792 * giga, PCIe: pcie5x16, Network: 25 * gbit,
		Source: "NVIDIA RTX Blackwell GPU architecture whitepaper (fp16 and fp8 with fp32 accumulation)"},
}

// List returns every preset, by generation and size. The caller may change the slice.
func List() []GPU {
	out := slices.Clone(table)
	for i := range out {
		out[i].Aliases = slices.Clone(out[i].Aliases)
	}
	return out
}

// Lookup finds a preset by its name or an alias, in any case; underscores and spaces count as
// hyphens. The error for an unknown name lists the nearest ones.
func Lookup(name string) (GPU, error) {
	key := normal(name)
	for _, g := range List() {
		if g.Name == key || slices.Contains(g.Aliases, key) {
			return g, nil
		}
	}
	return GPU{}, fmt.Errorf("GPU %q is not known; the nearest are %s", name, strings.Join(nearest(key, 3), ", "))
}

func normal(name string) string {
	key := strings.ToLower(strings.TrimSpace(name))
	key = strings.NewReplacer("_", "-", " ", "-").Replace(key)
	return strings.TrimPrefix(key, "nvidia-")
}

// byProduct returns the preset for a product name as NVML spells it.
func byProduct(product string) (GPU, bool) {
	product = strings.TrimPrefix(product, "NVIDIA ")
	var best GPU
	for _, g := range List() {
		if product == g.Product || strings.HasPrefix(product, g.Product+" ") && len(g.Product) > len(best.Product) {
			best = g
		}
	}
	return best, best.Name != ""
}

// Product returns the preset for a product name as the driver spells it, with the memory that
// the driver reports. An unknown product gets the rates of Usual.
func Product(name string, memory int64) GPU {
	g, ok := byProduct(name)
	if !ok {
		g = Usual()
		g.Source = "not in the table: the rates are those of " + g.Name
		g.Name, g.Product = normal(name), name
	}
	g.Memory = memory
	return g
}

// Usual is the GPU assumed for plans if none is specified.
func Usual() GPU {
	g, _ := byProduct("A100-SXM4-80GB")
	return g
}

// Generation returns the generation of a preset's card; "" of an unknown one.
func Generation(name string) string {
	g, err := Lookup(name)
	if err != nil {
		return ""
	}
	return string(g.Arch)
}

// nearest returns the n presets with the names most like key.
func nearest(key string, n int) []string {
	var entries [][]string
	for _, g := range table {
		entries = append(entries, append([]string{g.Name}, g.Aliases...))
	}
	return names.Names(key, entries, n)
}
