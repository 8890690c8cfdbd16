"""The field's own objects, free of models, caches and serving: trees, sampling, verification."""
