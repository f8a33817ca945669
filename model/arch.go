package model

import "slices"

// Family names an architecture.
type Family string

// Arch is an architecture: the keys of its config.json, the names of its tensors, its
// forward program and the published models of it are in one file of this package. A
// new one is that file, a row of archs, and the fields of Config that no other has.
type Arch struct {
	Family     Family
	Types      []string // the values of config.json's model_type that are of it
	Classifier bool     // its samples have one target, and it has no tokens and no config.json
	Dropout    bool     // its training has dropout
	CPUOnly    string   // why no GPU runs it, though it can be planned for one; "": one does
	Presets    []Preset

	defaults func(*Config)                            // fills in zeros
	check    func(Config) error                       // what is wrong with its sizes
	forward  func(*writer)                            // writes the program
	read     func(o *object, modelType string) Config // from config.json
	write    func(Config, *orderedMap)                // to config.json, without the keys that all have
}

var archs = []*Arch{&gpt2Arch, &llamaArch, &gemma2Arch, &mlpArch, &cnnArch}

// archOf returns the architecture of a family; nil for an unknown one.
func archOf(f Family) *Arch {
	i := slices.IndexFunc(archs, func(a *Arch) bool { return a.Family == f })
	if i < 0 {
		return nil
	}
	return archs[i]
}

// Arch returns the architecture of c; nil for an unknown family.
func (c Config) Arch() *Arch { return archOf(c.Family) }

// families lists the known families for an error.
func families() (names []string) {
	for _, a := range archs {
		names = append(names, string(a.Family))
	}
	return names
}
