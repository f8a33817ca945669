package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Version is the layout version that Save writes; readers also accept earlier ones. Version 1
// has no owner, id or samples. Version 2 has them; both keep each state as one file of whole
// tensors in fp32.
const Version = sharded

// sharded is the first version with a file for each rank.
const sharded = 3

// ModelState is the name of the state that holds the parameters.
const ModelState = "model"

// maxManifest bounds the bytes read of a manifest. It holds a few lines for each file and
// tensor, and the run's settings.
const maxManifest = 16 << 20

// Manifest describes a checkpoint.
type Manifest struct {
	Version  int             `json:"version"`
	Step     int             `json:"step"`      // steps done
	PlanHash string          `json:"plan_hash"` // of the program that wrote it, for information
	Ranks    int             `json:"ranks"`     // that wrote it, for information
	Zero     int             `json:"zero"`      // stage that wrote it, for information
	ID       string          `json:"id,omitempty"`
	Owner    string          `json:"owner,omitempty"`    // the run that wrote it and alone may remove it; "": version 1
	Mark     string          `json:"mark,omitempty"`     // who may replace it, see Options.Mark
	Replaces []string        `json:"replaces,omitempty"` // runs of that mark whose checkpoints it replaces
	Written  *time.Time      `json:"written,omitempty"`  // UTC, for information
	Run      json.RawMessage `json:"run"`                // record that a resumed run needs
	Tensors  []Tensor        `json:"tensors,omitempty"`  // complete logical tensors; none before version 3
	Files    []File          `json:"files"`
	CRC32C   string          `json:"crc32c"` // of the manifest itself, see sealed
}

// Tensor is a logical tensor: a parameter and its saved states.
type Tensor struct {
	Name    string   `json:"name"`
	Shape   []int64  `json:"shape"`
	States  []string `json:"states"`
	Scalars []string `json:"scalars,omitempty"` // the States that are one number per tensor
}

// Elements returns the number of elements of a state of the tensor.
func (t *Tensor) Elements(state string) int64 {
	n := int64(1)
	if !t.scalar(state) {
		for _, d := range t.Shape {
			n *= d
		}
	}
	return n
}

func (t *Tensor) scalar(state string) bool { return slices.Contains(t.Scalars, state) }

// File is one file of a checkpoint.
type File struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	CRC32C string `json:"crc32c"` // of the file, or of its header alone
	// Header is how many bytes at the start of the file CRC32C covers. In a rank's file they
	// hold the checksums of all that follows. 0: CRC32C covers the whole file.
	Header int64 `json:"header,omitempty"`
}

// file finds a file by its name.
func (m *Manifest) file(name string) (File, bool) {
	i := slices.IndexFunc(m.Files, func(f File) bool { return f.Name == name })
	if i < 0 {
		return File{}, false
	}
	return m.Files[i], true
}

// Has tells whether the checkpoint holds a state of any tensor.
func (m *Manifest) Has(state string) bool { return slices.Contains(m.States(), state) }

// States lists the states that the checkpoint holds.
func (m *Manifest) States() (names []string) {
	if m.Version < sharded {
		for _, f := range m.Files {
			if name, ok := strings.CutSuffix(f.Name, tensorsExt); ok {
				names = append(names, name)
			}
		}
		return names
	}
	for i := range m.Tensors {
		for _, s := range m.Tensors[i].States {
			if !slices.Contains(names, s) {
				names = append(names, s)
			}
		}
	}
	return names
}

// tensor finds a logical tensor by its name.
func (m *Manifest) tensor(name string) *Tensor {
	i, ok := slices.BinarySearchFunc(m.Tensors, name, func(t Tensor, name string) int { return strings.Compare(t.Name, name) })
	if !ok {
		return nil
	}
	return &m.Tensors[i]
}

// key tells checkpoints of the same name apart in the store's marks.
func (m *Manifest) key() string {
	if m.ID != "" {
		return m.ID
	}
	return fmt.Sprintf("%d-%s", m.Step, m.CRC32C)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum(text []byte) string { return fmt.Sprintf("%08x", crc32.Checksum(text, castagnoli)) }

const sumKey = `"crc32c": "`

// text returns the manifest as its file holds it. The last field is the CRC-32C of the text
// with zeros in that field's place, so it can be checked in later versions, whose other fields
// this program does not know.
func (m Manifest) text() ([]byte, error) {
	m.CRC32C = "00000000"
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return nil, err
	}
	text = append(text, '\n')
	copy(text[bytes.LastIndex(text, []byte(sumKey))+len(sumKey):], sum(text))
	return text, nil
}

// sealed tells whether the text carries its own checksum.
func sealed(text []byte) bool {
	i := bytes.LastIndex(text, []byte(sumKey)) + len(sumKey)
	if i < len(sumKey) || i+8 > len(text) {
		return false
	}
	blank := slices.Clone(text)
	copy(blank[i:], "00000000")
	return sum(blank) == string(text[i:i+8])
}

// sealedV1 tells whether a version 1 manifest has its checksum. That is of the compact JSON
// without the checksum's value, as its writer encoded the fields.
func (m Manifest) sealedV1(text []byte) bool {
	whole, err := json.MarshalIndent(m, "", "  ")
	if err != nil || !bytes.Equal(append(whole, '\n'), text) {
		return false
	}
	want := m.CRC32C
	m.CRC32C = ""
	compact, err := json.Marshal(m)
	return err == nil && sum(compact) == want
}

// parseManifest reads a manifest's text. Errors wrap ErrDamaged or ErrNewer.
func parseManifest(text []byte) (Manifest, error) {
	var m Manifest
	if err := json.Unmarshal(text, &m); err != nil {
		return Manifest{}, fmt.Errorf("%w: %s", ErrDamaged, unreadable(text, err))
	}
	if whole := m.Version == 1 && m.sealedV1(text) || m.Version != 1 && sealed(text); !whole {
		return Manifest{}, fmt.Errorf("%w: it does not have the checksum that it says", ErrDamaged)
	}
	if m.Version > Version {
		return Manifest{}, fmt.Errorf("%w: its layout is version %d; this program reads versions 1 to %d", ErrNewer, m.Version, Version)
	}
	return m, m.check()
}

// unreadable says where a manifest's text is not what a save writes.
func unreadable(text []byte, err error) string {
	at, what := int64(len(text)), err.Error()
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case len(bytes.TrimSpace(text)) == 0:
		return "it is empty"
	case errors.As(err, &syntax):
		at = syntax.Offset
	case errors.As(err, &kind):
		at, what = kind.Offset, fmt.Sprintf("%.40s where a save writes none", kind.Value)
		if kind.Field != "" {
			what = fmt.Sprintf("%.80q is of the kind %.40s", kind.Field, kind.Value)
		}
	}
	line := 1 + bytes.Count(text[:max(0, min(at, int64(len(text)))-1)], []byte("\n"))
	return fmt.Sprintf("its text is not what a save writes, from line %d on (%s)", line, what)
}

// check refuses manifests that no writer produces: a correct checksum does not prove that the
// contents are safe.
func (m *Manifest) check() error {
	switch {
	case m.Version < 1:
		return fmt.Errorf("%w: version %d", ErrDamaged, m.Version)
	case m.Step < 0 || m.Step > largestStep:
		return fmt.Errorf("%w: step %d", ErrDamaged, m.Step)
	case m.Version > 1 && (m.Owner == "" || m.ID == ""):
		return fmt.Errorf("%w: it names no run", ErrDamaged)
	}
	seen := map[string]bool{manifestName: true}
	for _, f := range m.Files {
		if f.Name == "" || f.Name == "." || !filepath.IsLocal(f.Name) || strings.ContainsAny(f.Name, `/\`) || seen[f.Name] {
			return fmt.Errorf("%w: it lists a file %.80q, which is not a plain or unique file name", ErrDamaged, f.Name)
		}
		if f.Bytes < 0 {
			return fmt.Errorf("%w: it gives %s %d bytes", ErrDamaged, f.Name, f.Bytes)
		}
		if f.Header < 0 || f.Header > f.Bytes {
			return fmt.Errorf("%w: it says that the header of %s has %d of the file's %d bytes", ErrDamaged, f.Name, f.Header, f.Bytes)
		}
		seen[f.Name] = true
	}
	return m.checkTensors()
}

// checkTensors checks that tensors are sorted by name and have valid shapes.
func (m *Manifest) checkTensors() error {
	for i := range m.Tensors {
		t := &m.Tensors[i]
		if i > 0 && m.Tensors[i-1].Name >= t.Name {
			return fmt.Errorf("%w: it lists tensor %.80q out of order", ErrDamaged, t.Name)
		}
		n := int64(1)
		for _, d := range t.Shape {
			if d < 1 || n > math.MaxInt64/8/d {
				return fmt.Errorf("%w: it gives tensor %.80q the shape %v", ErrDamaged, t.Name, t.Shape)
			}
			n *= d
		}
	}
	return nil
}

// ReadManifest reads the manifest of the checkpoint at a path and none of its other files.
// Errors wrap ErrDamaged or ErrNewer.
func ReadManifest(folder string) (Manifest, error) {
	f, err := filesys.Open(folder)
	if err != nil {
		return Manifest{}, missing(folder, err)
	}
	defer f.Close()
	return readManifest(f)
}

func readManifest(in filesys.Folder) (Manifest, error) {
	path := filepath.Join(in.Path(), manifestName)
	f, err := filesys.OpenRegular(in, manifestName)
	if errors.Is(err, os.ErrNotExist) {
		return Manifest{}, fmt.Errorf("%w: %s is missing", ErrDamaged, path)
	}
	if err != nil {
		return Manifest{}, faulty(err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	switch {
	case err != nil:
		return Manifest{}, fmt.Errorf("%w: %w", ErrDamaged, err)
	case len(text) > maxManifest:
		return Manifest{}, fmt.Errorf("%w: %s is over %d bytes", ErrDamaged, path, maxManifest)
	}
	m, err := parseManifest(text)
	if err != nil {
		return Manifest{}, fmt.Errorf("%s: %w", path, err)
	}
	return m, nil
}
