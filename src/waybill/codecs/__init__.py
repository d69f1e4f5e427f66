"""Producer layouts to the canonical one. Sees headers, bits and bytes; knows no model, no path, no float weight."""
