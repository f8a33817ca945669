// Package release reports the version of this build.
package release

import "runtime/debug"

// Releases set these: -ldflags "-X PACKAGE.version=v1.2.3 -X PACKAGE.commit=0123456789ab", where PACKAGE is this one.
var version, commit string

// Commit returns the commit of this build, "" if it is not known, and whether the build
// has changes since it.
func Commit() (at string, changed bool) {
	at = commit
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				at = s.Value[:min(12, len(s.Value))]
			case "vcs.modified":
				changed = s.Value == "true"
			}
		}
	}
	return at, changed
}

// Text returns the version and the commit of this build, as far as they are known.
func Text() string {
	v := version
	if info, ok := debug.ReadBuildInfo(); ok && v == "" && info.Main.Version != "(devel)" {
		v = info.Main.Version
	}
	at, changed := Commit()
	if at != "" && changed {
		at += " with changes"
	}
	if v == "" {
		v = "development version"
	}
	if at != "" {
		v += " (" + at + ")"
	}
	return v
}
